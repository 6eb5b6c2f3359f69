"""Brings an image to the hosts that lack it: each pulls from a registry inside this command, through ssh.

Where that cannot be, `docker save` here and `docker load` there bring the whole image.
"""

import json
import shutil
import subprocess
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tridock.command import Command
from tridock.contracts.run_folder import write_atomic
from tridock.errors import ClusterError, Problem, count
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image import registries
from tridock.ops.image.registries import NOTE_IT, Base, note, reason_of, script
from tridock.ops.image.registry import LoopbackRegistry
from tridock.progress import Bar, Bars, bars
from tridock.remote import Host, LocalHost
from tridock.remote.host import remedy_of

KNOWN: Final = "layers.json"
"""What :class:`Export` keeps in the cache."""
_PUSHED_AS: Final = "pushed-as"
"""In the cache as long as the engine has a name to push the image by: that name. The command holds the cache's lock."""
_CHUNK: Final = 1 << 20
_ASK_S: Final = 60.0
# Without --quiet it prints all the time, and so ends soon after this side is gone.
_PULL: Final = f'set -eu; docker pull "$1"; docker tag "$1" "$2"; docker image rm "$1"; {NOTE_IT}'
_LOAD: Final = f"set -eu; docker load; {NOTE_IT}"


def bring(hosts: Hosts, image_id: str, nodes: tuple[str, ...], folder: Path) -> None:
    """Brings the image to the hosts of ``nodes``; ``folder`` keeps compressed layers until all have it.

    Raises :class:`ClusterError` with the problem of every host that failed.
    """
    if hosts.cluster.settings.registry is not None:
        registries.through_registry(hosts, image_id, nodes)
        return
    layers = Command.of("docker", "image", "inspect", "--format", "{{json .RootFS.Layers}}", image_id)
    diff_ids = json.loads(LocalHost().run(layers, timeout=_ASK_S).checked(image_id).stdout)
    base = registries.base_of(diff_ids)
    registries.pull_base(hosts, base, diff_ids, nodes)
    with bars(quiet=hosts.quiet) as begin:
        delivery = Delivery(hosts, image_id, begin)
        local = LocalHost()
        with LoopbackRegistry(folder, begin("compress the layers", None), local.close, delivery.served) as registry:
            registry.refused.add(image_id)  # in the classic store, the configuration's digest
            export = Export(registry, local, hosts.cluster.settings.image, diff_ids, base)
            with export.pushed() as reason:
                if reason:
                    note(f"hosts get the whole image (docker save), docker push does not reach this command: {reason}")
                hosts.each(lambda node, host: delivery.to(node, host, None if reason else export), only=nodes)


class Export:
    """The operator's image in the registry, layer by layer.

    Docker's classic image store knows a layer by its content, and by the digests of all compressed forms that it met.
    The engine here names the newest without compressing anything, but compresses anew what it has to send. A host knows
    the digest that it has pulled. So a layer has two: ``elsewhere``, such as in the base image's registry, and here.
    """

    def __init__(
        self, registry: LoopbackRegistry, local: LocalHost, image: str, diff_ids: Sequence[str], base: Base | None
    ) -> None:
        self.registry = registry
        self.failure: ClusterError | None = None
        self._local, self._image, self._diff_ids, self._base = local, image, list(diff_ids), base
        self._latest = b""
        self._file = registry.folder / KNOWN
        known: dict[str, Any] = json.loads(self._file.read_bytes()) if self._file.exists() else {}
        registry.sizes.update(known.get("sizes", {}))
        self._elsewhere: dict[str, Any] = known.get("elsewhere", {})
        self._asking = threading.Lock()

    @contextmanager
    def pushed(self) -> Iterator[str]:
        """Pushes what the block's hosts ask for. Yields why the engine cannot push to the registry, else nothing."""
        name = self._name = f"{self.registry.repository}:push"
        noted = self.registry.folder / _PUSHED_AS
        if noted.exists():  # that command was killed
            self._local.run(Command.of("docker", "image", "rm", noted.read_text()), timeout=_ASK_S)
        with suppress(OSError):  # a full disk has its own message
            write_atomic(noted, name.encode())
        self._local.run(Command.of("docker", "tag", self._image, name), timeout=_ASK_S).checked("docker")
        try:
            reason = self._push()
            threading.Thread(target=self._push_what_is_wanted, daemon=True).start()
            yield reason
        finally:
            self._local.close()
            if not self._local.run(Command.of("docker", "image", "rm", name), timeout=_ASK_S).exit_code:
                noted.unlink(missing_ok=True)
            known = {"sizes": dict(self.registry.sizes), "elsewhere": self._elsewhere}
            with suppress(OSError):  # a full disk has its own message
                write_atomic(self._file, json.dumps(known).encode())

    def manifests(self, host: Host) -> Iterator[bytes]:
        """Yields the manifests that a host can try: with digests from elsewhere, and with those from here.

        Containerd's image store needs the size of every layer, which is unknown of what never came from here.
        """
        exact = not self._are_known(self._manifest(self._elsewhere)) and _has_containerds_store(host)
        with self._asking:
            if exact and self._base and not self._are_known(self._manifest(self._elsewhere)):
                self.registry.sizes.update(registries.sizes_in_registry(self._base.reference))
        tried, elsewhere = list[dict[str, Any]](), self._elsewhere
        while (manifest := self._manifest(elsewhere)) not in tried:
            tried.append(manifest)
            if not exact or self._are_known(manifest):
                yield self._latest if manifest == json.loads(self._latest) else json.dumps(manifest).encode()
            elsewhere = {}
            for layer in self._manifest({})["layers"] if exact else ():
                if not layer["size"]:
                    self.registry.fetch(layer["digest"])

    def _manifest(self, elsewhere: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the image's manifest, with some layers as they are elsewhere, and with all sizes that are known."""
        manifest: dict[str, Any] = json.loads(self._latest)
        layers = [elsewhere.get(diff, it) for diff, it in zip(self._diff_ids, manifest["layers"], strict=True)]
        sizes = self.registry.sizes
        layers = [{**it, "size": it.get("size") or sizes.get(it["digest"], 0)} for it in layers]
        return {**manifest, "layers": layers}

    def _are_known(self, manifest: Mapping[str, Any]) -> bool:
        return all(layer["size"] for layer in manifest["layers"])

    def _push(self) -> str:
        """Takes the image's manifest, and what the registry refuses. Returns why the engine cannot, else nothing."""
        registry, names = self.registry, dict[str, bytes]()
        registry.failure = None  # of an earlier push
        for _ in ("manifests", "configurations"):
            done = self._local.run(Command.of("docker", "push", self._name))
            if registry.failure is not None:
                free = shutil.disk_usage(registry.folder).free / 1e9
                got = f"{registry.failure}, {free:.1f} GB free in {registry.folder}"
                todo = "free some space there, or set XDG_CACHE_HOME to a larger disk"
                raise ClusterError(Problem(f"docker push {self._image}", "could not be written to a file", got, todo))
            if done.exit_code:
                return reason_of(done)
            # The engine has one for each platform, and for attestations: the configurations tell them apart.
            sized = {config: (len(json.loads(it).get("layers", ())), it) for config, it in registry.pushed.items()}
            names = {config: it for config, (layers, it) in sized.items() if layers == len(self._diff_ids)}
            if not (missing := {config for config in names if not (registry.folder / config).exists()}):
                break
            registry.refused |= missing
        ours = [it for config, it in names.items() if registry.diff_ids(config) == self._diff_ids]
        if not ours:
            return "no manifest of the image came"
        self._latest = ours[0]
        registry.claimed = {layer["digest"] for layer in json.loads(self._latest)["layers"]}
        for diff, layer in zip(self._diff_ids, json.loads(self._latest)["layers"], strict=True):
            if not layer.get("size"):
                self._elsewhere[diff] = layer
            elif (registry.folder / self._elsewhere.get(diff, layer)["digest"]).exists():
                self._elsewhere.pop(diff, None)
        return ""

    def _push_what_is_wanted(self) -> None:
        while wanted := self.registry.wanted():
            digests = [layer["digest"] for layer in json.loads(self._latest)["layers"]] if self._latest else []
            if named := wanted.intersection(digests):
                # A host that lacks a layer lacks those above it too.
                above = digests[min(map(digests.index, named)) :]
                self.registry.refused |= {it for it in above if not (self.registry.folder / it).exists()}
                try:
                    if reason := self._push():
                        todo = "look at the Docker engine here, then try again"
                        raise ClusterError(Problem(f"docker push {self._image}", "failed", reason, todo))
                except ClusterError as error:
                    self.failure = error
            self.registry.refuse_to_wait(wanted)


class Delivery:
    def __init__(self, hosts: Hosts, image_id: str, begin: Bars) -> None:
        self._hosts, self._image_id, self._begin = hosts, image_id, begin
        self._bars: dict[str, Bar] = {}
        self._layers, self._sent, self._sizes = Counter[str](), Counter[str](), Counter[str]()

    def served(self, node: str, sent: int, layer: int) -> None:
        """Counts ``sent`` bytes, and a ``layer`` of so many bytes that has begun."""
        self._layers[node] += bool(layer)
        self._sent[node] += sent
        self._sizes[node] += layer
        self._bars[node].set(self._sent[node], self._sizes[node] or None)

    def to(self, node: str, host: Host, export: Export | None) -> None:
        """Brings the image to a host, the whole image if there is no export or the host cannot reach it."""
        self._bars[node] = self._begin(f"send to {node}", None)
        if export is not None:
            if not (reason := self._pull(node, host, export)):
                layers = count(self._layers[node], "layer")
                self._say(f"{node}: got {layers} of the image, {self._sent[node] / 1e6:,.1f} MB")
                return
            note(f"{node}: gets the whole image (docker save), it cannot pull it through ssh: {reason}")
        load = script(self._hosts, node, _LOAD, "", self._image_id)
        saved = _saved(self._hosts.cluster.settings.image)
        done = host.pipe(saved, load, lambda size: self.served(node, size, 0))
        replace(done, command="docker load").checked(node)
        self._say(f"{node}: got the whole image, {self._sent[node] / 1e6:,.1f} MB")

    def _pull(self, node: str, host: Host, export: Export) -> str:
        """Returns why the host's engine cannot reach the registry, else nothing."""
        registry = export.registry
        with ExitStack() as stack:
            try:
                port = stack.enter_context(host.forwarded(registry.port))
            except ClusterError as error:
                problem = error.problems[0]
                return f"{problem.what} ({problem.got}); {problem.todo}"
            name, reason = registry.add_reader(node, port), "the sizes of its layers are unknown"
            for manifest in export.manifests(host):
                self._layers[node] = 0
                reference = f"{name}@{registry.publish(manifest)}"
                done = host.run(script(self._hosts, node, _PULL, reference, self._image_id))
                if not done.exit_code:
                    return ""
                reason = reason_of(done)
                if node not in registry.reached:
                    return reason
        raise export.failure or ClusterError(Problem(node, "docker pull failed", reason, remedy_of(1, reason)))

    def _say(self, text: str) -> None:
        if not self._hosts.quiet:
            print(text)


def _has_containerds_store(host: Host) -> bool:
    info = Command.of("docker", "info", "--format", "{{json .DriverStatus}}")
    return b"io.containerd.snapshotter" in host.run(info, timeout=_ASK_S).stdout


def _saved(image: str) -> Iterator[bytes]:
    """Yields what `docker save` writes, as a gzip file."""
    named = image if ":" in image.rpartition("/")[2] else f"{image}:latest"  # else all tags
    packer = zlib.compressobj(1, wbits=31)
    with subprocess.Popen(["docker", "save", named], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as save:
        assert save.stdout is not None
        assert save.stderr is not None
        try:
            while chunk := save.stdout.read(_CHUNK):
                yield packer.compress(chunk)
            yield packer.flush()
            reason = save.stderr.read().decode(errors="replace").strip()
            if code := save.wait():
                raise ClusterError(Problem(f"docker save {named}", "failed", reason, remedy_of(code, reason)))
        finally:
            save.kill()
