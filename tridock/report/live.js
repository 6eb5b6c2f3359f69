"use strict";
// Draws what /data says. Everything from a run goes into the page as text, never as markup.
const settings = JSON.parse(document.getElementById("settings").textContent);
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 24;
const colour = (number) => `var(--s${number % 8})`;
const charts = new Map();

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
function put(id, ...children) {
  document.getElementById(`${id}-content`).replaceChildren(...children);
}
function hide(id, hidden) {
  document.getElementById(id).hidden = hidden;
  document.querySelector(`nav a[href="#${id}"]`).hidden = hidden;
}
function figure(value) {
  if (value === null || value === undefined) return "-";
  if (Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en");
  return String(value !== 0 && Math.abs(value) < 1e-3 ? Number(value.toPrecision(4)).toExponential() : Number(value.toPrecision(5)));
}
const gib = (bytes) => bytes >= 2 ** 30 / 2 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`;

function table(head, rows, marked = []) {
  const body = rows.map((row, number) => node("tr", marked[number] ? { class: "fault" } : {}, ...row.map((text, column) => node(column ? "td" : "th", {}, text))));
  const made = node("table", {}, node("thead", {}, node("tr", {}, ...head.map((text) => node("th", {}, text)))), node("tbody", {}, ...body));
  return node("div", { class: "scroll" }, made);
}

function ticks(low, high, count) {
  const raw = (high - low) / count || Math.abs(low) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((it) => it * power).find((it) => it >= raw) ?? raw;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9 && found.length < 12; at += step) found.push(at);
  return found;
}

// A chart: a figure that the keyboard reaches; the arrow keys move a cursor over its points.
class Chart {
  constructor(name, title, unit) {
    this.unit = unit;
    this.title = title;
    this.reading = node("p", { class: "reading soft" });
    this.svg = shape("svg", { role: "img" });
    this.element = node("figure", { class: "live", tabindex: "0", id: `chart-${name}` }, node("h3", {}, unit ? `${title} (${unit})` : title), this.svg, this.reading);
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("blur", () => this.at(null));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.at(this.low + ((event.clientX - box.left) / box.width * this.width - LEFT) / (this.width - LEFT - RIGHT) * (this.high - this.low));
    });
    this.svg.addEventListener("pointerleave", () => this.at(null));
    this.cursor = null;
  }
  draw(lines, marks) {
    [this.lines, this.marks] = [lines, marks];
    this.width = this.svg.clientWidth || 560;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const xs = lines.flatMap((line) => line.points.map((point) => point[0]));
    const ys = lines.flatMap((line) => line.points.map((point) => point[1])).filter((value) => value !== null);
    [this.low, this.high] = [Math.min(...xs), Math.max(...xs)];
    if (this.low === this.high) [this.low, this.high] = [this.low - 1, this.high + 1];
    let [bottom, top] = [Math.min(...ys), Math.max(...ys)];
    const logarithmic = bottom > 0 && top / bottom > 50;
    const form = logarithmic ? Math.log10 : (value) => value;
    [bottom, top] = [form(bottom), form(top)];
    if (bottom === top) [bottom, top] = [bottom - Math.abs(bottom || 1) * 0.1, top + Math.abs(top || 1) * 0.1];
    this.x = (value) => LEFT + (value - this.low) / (this.high - this.low) * (this.width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (form(value) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const tick of ticks(bottom, top, 4)) {
      const value = logarithmic ? Number((10 ** tick).toPrecision(1)) : tick, y = this.y(value);
      if (y < TOP || y > HEIGHT - BOTTOM) continue;
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      const text = shape("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" });
      text.textContent = figure(Number(value.toPrecision(4)));
      parts.push(text);
    }
    for (const tick of ticks(this.low, this.high, this.width / 90)) {
      const text = shape("text", { x: this.x(tick), y: HEIGHT - 6, "text-anchor": this.x(tick) > this.width - 40 ? "end" : "middle" });
      text.textContent = tick.toLocaleString("en");
      parts.push(text);
    }
    for (const at of marks) if (at >= this.low && at <= this.high) parts.push(shape("line", { class: "mark", x1: this.x(at), x2: this.x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
    for (const line of lines) {
      let path = "", pen = "M";
      for (const [x, y] of line.points) {
        if (y === null) { pen = "M"; continue; }
        path += `${pen}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
        pen = "L";
      }
      parts.push(shape("path", { class: "line", d: path, stroke: line.colour, "stroke-dasharray": line.dash ?? "none" }));
      const known = line.points.filter((point) => point[1] !== null);
      if (known.length <= 40) for (const [x, y] of known) parts.push(shape("circle", { cx: this.x(x), cy: this.y(y), r: 2.5, fill: line.colour }));
    }
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${this.title}. ${lines.map((line) => `${line.name}: last ${figure(line.points.findLast((point) => point[1] !== null)?.[1])}`).join("; ")}`);
    this.at(this.cursor, false);
  }
  at(value, spoken = true) {
    this.svg.querySelector(".cursor")?.remove();
    this.cursor = value;
    if (value === null) {
      this.reading.textContent = this.lines?.map((line) => `${line.name} ${figure(line.points.findLast((point) => point[1] !== null)?.[1])}`).join(" · ") ?? "";
      return;
    }
    const nearest = this.lines.map((line) => line.points.reduce((best, point) => Math.abs(point[0] - value) < Math.abs(best[0] - value) ? point : best));
    const place = nearest[0][0];
    this.svg.append(shape("line", { class: "cursor", x1: this.x(place), x2: this.x(place), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.reading.textContent = `iteration ${place.toLocaleString("en")}: ${this.lines.map((line, number) => `${line.name} ${figure(nearest[number][1])}`).join(" · ")}`;
    if (spoken) document.getElementById("spoken").textContent = this.reading.textContent;
  }
  key(event) {
    const points = this.lines[0].points;
    let index = this.cursor === null ? points.length - 1 : points.findIndex((point) => point[0] >= this.cursor);
    if (index < 0) index = points.length - 1;
    const stride = event.shiftKey ? 20 : 1;
    const moves = { ArrowLeft: index - stride, ArrowRight: index + stride, Home: 0, End: points.length - 1 };
    if (event.key === "Escape") return this.at(null);
    if (!(event.key in moves)) return undefined;
    event.preventDefault();
    return this.at(points[Math.max(0, Math.min(points.length - 1, moves[event.key]))][0]);
  }
}

function summary(runs) {
  const rows = runs.map((run, number) => [
    node("span", {}, node("span", { class: "chip", style: `background:${colour(number)}` }), run.run),
    node("span", { class: `state ${run.state}` }, run.state + (run.exit_code ? ` (${run.exit_code})` : "")),
    run.iteration === null ? "-" : run.iteration.toLocaleString("en"),
    figure(run.curves.loss?.at(-1)?.[1]),
    run.curves.tokens_per_second ? figure(run.curves.tokens_per_second.at(-1)[1]) : "-",
    String(run.restarts),
    run.world_size ? `${run.world_size}${run.layout ? `, ${run.layout}` : ""}` : "-",
    run.age_s === null ? "-" : `${Math.round(run.age_s)} s ago`,
  ]);
  const problems = runs.filter((run) => run.problem).map((run) => node("p", { class: "bad", role: "alert" }, `${run.run}: ${run.problem}`));
  put("summary", ...problems, table(["run", "state", "iteration", "loss", "tokens/s", "restarts", "ranks", "last record"], rows));
}

function drawCharts(runs) {
  const grid = document.querySelector("#charts-content .charts") ?? node("div", { class: "charts" });
  const several = runs.length > 1;
  for (const [name, [title, unit]] of Object.entries(settings.quantities)) {
    const lines = [];
    runs.forEach((run, number) => {
      if (run.curves[name]) lines.push({ name: several ? run.run : name === "loss" ? "training" : "last", points: run.curves[name], colour: colour(number) });
      if (name === "loss") for (const [split, dash] of [["valid", "6 4"], ["test", "2 3"]]) {
        const points = run.curves[`${split} loss`];
        if (points) lines.push({ name: several ? `${run.run} ${split}` : split, points, colour: colour(several ? number : split === "valid" ? 1 : 2), dash });
      }
    });
    if (!lines.length) continue;
    if (!charts.has(name)) {
      charts.set(name, new Chart(name, title, unit));
      grid.append(charts.get(name).element);
    }
    if (!grid.isConnected) put("charts", grid);
    charts.get(name).draw(lines, several ? [] : runs[0].marks);
  }
  hide("charts", !charts.size);
}

function bars(rows) {
  return node("div", { class: "bars" }, ...rows.flatMap(([name, share, hue, text, mark, late]) => {
    const bar = node("span", { class: "bar" }, node("i", { style: `width:${Math.max(0, Math.min(100, share * 100))}%;background:${hue}` }));
    if (mark !== undefined) bar.append(node("b", { style: `left:calc(${Math.min(100, mark * 100)}% - 2px)`, title: "planned" }));
    return [node("span", {}, name), bar, node("span", late ? { class: "late" } : {}, text)];
  }));
}

function sections(runs, id, make) {
  const parts = runs.map((run, number) => [run, make(run, number)]).filter(([, part]) => part);
  put(id, ...parts.flatMap(([run, part]) => runs.length > 1 ? [node("h3", {}, run.run), part] : [part]));
  hide(id, !parts.length);
}

function progressOf(rank) {
  const ago = `${Math.round(rank.age_s)} s ago`;
  return rank.limit_s === null ? ago : `${ago} (limit ${Math.round(rank.limit_s)} s)`;
}

function ranks(run, number) {
  if (!run.ranks.length) return null;
  const most = Math.max(1, ...run.ranks.map((rank) => rank.iteration));
  const rows = run.ranks.map((rank) => [
    `rank ${rank.rank}${rank.node ? ` · ${rank.node}` : ""}`, rank.iteration / most, colour(number),
    `${rank.phase} ${rank.iteration.toLocaleString("en")}` + (run.state === "running" ? `, ${progressOf(rank)}` : ""), undefined,
    run.state === "running" && rank.limit_s !== null && rank.age_s > rank.limit_s / 2,
  ]);
  const list = bars(rows);
  list.classList.add("ranks");
  list.tabIndex = 0;
  list.setAttribute("aria-label", `Ranks of ${run.run}`);
  return list;
}

function phases(run, number) {
  const found = Object.entries(run.phases).sort((a, b) => b[1] - a[1]);
  if (!found.length) return null;
  return bars(found.map(([name, time]) => [name.replaceAll("_", " "), time / found[0][1], colour(number), `${(time * 1000).toPrecision(3)} ms`]));
}

function memory(run, number) {
  const count = Math.max(run.memory.length, run.planned_memory.length);
  if (!count) return null;
  const most = Math.max(...run.memory, ...run.planned_memory);
  const rows = Array.from({ length: Math.min(count, 256) }, (_, rank) => {
    const [used, planned] = [run.memory[rank] ?? null, run.planned_memory[rank] ?? null];
    const text = [used === null ? null : gib(used), planned === null ? null : `planned ${gib(planned)}`].filter(Boolean).join(", ");
    return [`rank ${rank}`, (used ?? 0) / most, colour(number), text, planned === null ? undefined : planned / most];
  });
  return bars(rows);
}

function samples(run) {
  if (!run.samples) return null;
  const made = table(["prompt", `text after iteration ${run.samples.iteration.toLocaleString("en")}`], run.samples.rows);
  made.querySelector("table").className = "samples";
  return made;
}

function events(run) {
  if (!run.events.length) return null;
  const shown = run.events.slice().reverse();
  const text = (event) => Object.entries(event).filter(([name]) => !["time", "event", "fault"].includes(name)).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ").slice(0, 600);
  const rows = shown.map((event) => [String(event.time ?? "").slice(0, 19).replace("T", " "), String(event.event), text(event)]);
  const made = table(["time (UTC)", "event", ""], rows, shown.map((event) => event.fault));
  made.querySelector("table").className = "events";
  return made;
}

addEventListener("resize", () => charts.forEach((chart) => chart.draw(chart.lines, chart.marks)));
let failures = 0, last = "";
async function refresh() {
  const moment = document.getElementById("moment");
  try {
    const answer = await fetch(`${location.pathname.replace(/\/*$/, "/")}data`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    const text = await answer.text();
    failures = 0;
    if (text !== last) {
      last = text;
      const runs = JSON.parse(text);
      if (runs.length) {
        summary(runs);
        drawCharts(runs);
        sections(runs, "samples", samples);
        sections(runs, "ranks", ranks);
        sections(runs, "phases", phases);
        sections(runs, "memory", memory);
        sections(runs, "events", events);
        document.body.dataset.drawn = "yes";
      }
    }
    moment.textContent = `As of ${new Date().toLocaleTimeString()}; renewed every ${settings.poll_s} s.`;
    moment.className = "soft";
  } catch (error) {
    failures += 1;
    moment.textContent = "tridock watch has ended here, or does not answer: start it again.";
    moment.className = "bad";
  }
  setTimeout(refresh, settings.poll_s * 1000 * Math.min(failures + 1, 5));
}
refresh();
