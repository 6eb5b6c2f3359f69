"""A host over ssh: the operator's own OpenSSH client, with one connection a host that its commands share.

OpenSSH reads the user's configuration, agents, keys and known hosts; Tridock reads none of them. The first command logs
in and leaves a ControlMaster, which the next ones find for a minute (``ControlPersist``), those of the next Tridock
command too. A ControlPath of the user's own configuration is used instead. Where sshd opens no further session on a
connection (MaxSessions), ssh itself opens another.
"""

import hashlib
import os
import random
import secrets
import shlex
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.command import Command
from tridock.contracts.run_folder import write_atomic
from tridock.errors import ClusterError, Problem, RequestError
from tridock.remote import clock
from tridock.remote.host import Host, shortened
from tridock.remote.login_shell import Marks, script_line
from tridock.remote.process import OverdueError, Process, Sink
from tridock.remote.ssh_errors import Target, connection_problem, is_refused_login, is_transient

_FIRST_WAIT_S: Final = 0.25
_LONGEST_WAIT_S: Final = 4.0
_SHELL_S: Final = 15.0
"""What a login may take beside ``connect_timeout``: authentication and the start-up files of the login shell."""
_TERMINAL_S: Final = 180.0
_SHORT_S: Final = 10.0
_START_UP: Final = "its start-up file (~/.bashrc, ~/.zshenv, ~/.tcshrc, ~/.cshrc, ~/.config/fish/config.fish)"
_NO_FORWARD: Final = "its sshd forwards no port to this machine"
_BEHIND_A_JUMP: Final = "UNKNOWN port"
"""Where ssh says so, it had no socket but a command to connect with, whose stderr a shared connection hides."""
_TERMINAL: Final = threading.Lock()
"""One login at a time asks at the terminal."""

_FORCED: Final = """\
Host *
  BatchMode no
  ConnectTimeout {timeout}
  ConnectionAttempts 1
  ControlMaster auto
  StrictHostKeyChecking yes
  UpdateHostKeys no
  LogLevel INFO
  VisualHostKey no
  RequestTTY no
  RemoteCommand none
  SessionType default
  StdinNull no
  ForkAfterAuthentication no
  PermitLocalCommand no
  ForwardX11 no
  ClearAllForwardings yes
Include {config}
Host *
  ControlPath "{folder}/{key}-%C"
  ControlPersist 60
  ServerAliveInterval 15
  ServerAliveCountMax 4
"""
"""ssh takes the first value of an option: what must be so, what the user has, what holds otherwise."""


@dataclass(frozen=True, slots=True)
class Login:
    """How to log in to one host: the cluster's ssh settings. None leaves a field to the user's ssh configuration."""

    address: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    config_file: str | None = None
    connect_timeout: float = 10.0

    def argv(self, *options: str) -> list[str]:
        """Returns ssh's command line up to the host, before the command. Raises if a file that it names is missing."""
        argv = ["ssh", "-F", str(self._config()), *(word for option in options for word in ("-o", option))]
        if self.user is not None:
            argv += ["-l", self.user]
        if self.port is not None:
            argv += ["-p", str(self.port)]
        if self.identity_file is not None:
            argv += ["-i", _existing(self.identity_file, "ssh.identity_file")]
        return [*argv, "--", self.address]

    def _config(self) -> Path:
        """Writes the configuration: the user's own between what must be and what is the default."""
        own = "~/.ssh/config /etc/ssh/ssh_config"
        if self.config_file is not None:
            own = f'"{_existing(self.config_file, "ssh.config_file")}"'
        folder = control_folder()
        # Another key or another configuration is another connection.
        key = hashlib.sha256(repr((self.identity_file, self.config_file)).encode()).hexdigest()[:8]
        text = _FORCED.format(timeout=max(1, round(self.connect_timeout)), config=own, folder=folder, key=key)
        path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.conf"
        if not path.exists():
            write_atomic(path, text.encode())
        return path

    def target(self) -> Target:
        """Returns what ssh makes of it, for messages. Raises :class:`ClusterError` where ssh takes too long to say."""
        argv = [self.argv()[0], "-G", *self.argv()[1:]]
        try:
            done = clock.run(argv, _SHORT_S)
        except subprocess.TimeoutExpired:
            got, todo = f"no answer within {_SHORT_S:g} s", "see what its `Match exec` runs"
            raise ClusterError(Problem(self.address, "ssh does not read its configuration", got, todo)) from None
        return Target.parse(done.stdout.decode(errors="replace"), self.address)


class SshHost(Host):
    """One host; user, port, keys, jump hosts and known hosts come from the ssh configuration unless given."""

    def __init__(self, name: str, login: Login, retries: int = 4, *, may_ask: bool = True) -> None:
        """``may_ask``: for a password, a code or a touch, at the terminal."""
        super().__init__(name)
        self._login, self._retries, self._may_ask = login, retries, may_ask
        self._first = threading.Lock()
        self._connected = False
        self._forgotten = 0

    def start(
        self,
        command: Command,
        sink: Sink,
        timeout: float | None = None,
        *,
        has_input: bool = True,
        merged: bool = False,
    ) -> Process:
        def begin() -> _SshProcess:
            marks = Marks(secrets.token_hex(8), sink)
            line = script_line(marks.script(command, timeout, merged=merged))
            return self._begun(lambda: _SshProcess(self, command, line, marks, has_input=has_input))

        if self._connected:
            return begin()
        with self._first:  # one login a host: the others share its connection
            process = begin()
            self._connected = True
            return process

    def at_terminal(self, command: Command) -> int:
        """As :meth:`Host.at_terminal`. ssh passes the terminal on, its size and its signals too."""
        line = script_line(f"exec {command.render()}")
        return subprocess.call(self.ssh(line, "RequestTTY=force", "LogLevel=ERROR"))

    def rsh(self, command: Command) -> str:
        mark = secrets.token_hex(8)
        ssh = shlex.join(self.ssh(script_line(f'echo {mark}; exec {command.render()} "$@"')))
        # What a start-up file prints comes before the mark. sh reads no byte more than the line.
        return f'{ssh} "$@" | {{ while read -r line; do case $line in *{mark}) exec cat;; esac; done; }}'

    def _begun(self, start: Callable[[], "_SshProcess"]) -> "_SshProcess":
        """Returns a process whose command has begun. Tries again where that may help; nothing was sent before."""
        wait, attempts, asked, anew = _FIRST_WAIT_S, 0, False, False
        while True:
            attempts += 1
            began, forgotten = time.time(), self._forgotten
            process = self._keep(start())
            if process.begins(self._login.connect_timeout + _SHELL_S):
                return process
            # A connection of an earlier command hangs if its host does, or its network was away: a new login tells.
            # Of two commands that hang on it, the second finds it forgotten.
            hangs = not process.has_ended()
            anew = hangs and not anew and (forgotten != self._forgotten or self._is_shared_since_before(began))
            if hangs and forgotten == self._forgotten:
                self.forget()
            process.end()
            if anew:
                continue
            text = self._jump_hosts_text() if _BEHIND_A_JUMP in process.text else process.text
            if is_refused_login(text) and self._may_ask and not asked and _has_terminal():
                asked = True
                self._log_in_at_terminal()
            elif not is_transient(text) or attempts > self._retries:
                raise self._refused(process, text, attempts)
            else:
                # Jitter, so that connections that were dropped together do not retry together.
                time.sleep(wait * random.uniform(0.5, 1.5))  # noqa: S311
                wait = min(2 * wait, _LONGEST_WAIT_S)

    def _is_shared_since_before(self, began: float) -> bool:
        """Whether the commands share a connection that was there at this time."""
        try:
            return os.lstat(self._login.target().control_path).st_mtime < began
        except (OSError, ClusterError):
            return False

    def _jump_hosts_text(self) -> str:
        """Returns what a jump host's ssh says. Without a connection to share, its stderr is ours."""
        done = self.short(self.ssh("exit", "ControlPath=none"), self._login.connect_timeout + _SHELL_S)
        return done.stderr.decode(errors="replace").replace("\r", "") if done else ""

    def _refused(self, process: "_SshProcess", text: str, attempts: int) -> Exception:
        target = self._login.target()
        if "bad configuration option" in text.lower() or "terminating, " in text:
            first = text.strip().splitlines()[0]
            return RequestError(Problem(self.name, "ssh cannot read its configuration", first, "fix what it names"))
        problem = connection_problem(self.name, target, text, attempts)
        return ClusterError(problem or start_up_problem(self.name, target, process))

    def short(self, argv: list[str], seconds: float, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes] | None:
        """Runs ssh apart from the commands; returns None if it does not end within the time."""
        try:
            return clock.run(argv, seconds, stdin=stdin, start_new_session=True)
        except subprocess.TimeoutExpired:
            return None

    def _log_in_at_terminal(self) -> None:
        """Logs in once as the user would: ssh asks at the terminal for a password, a code, or a touch."""
        # In this session: /dev/tty is where ssh asks. Its connection stays for the commands.
        argv, none = [*self._login.argv(), "exit"], subprocess.DEVNULL
        with _TERMINAL, subprocess.Popen(argv, stdin=none, stdout=none) as login:
            try:
                clock.wait(login, clock.now() + _TERMINAL_S)
            except subprocess.TimeoutExpired:
                login.kill()

    @contextmanager
    def forwarded(self, port: int) -> Iterator[int]:
        """As :meth:`Host.forwarded`, by the shared connection. Raises :class:`ClusterError` where that cannot be.

        The user's own forwards have no part in it: of the configuration only the ControlPath is used.
        """
        path = self._login.target().control_path
        if path in ("", "none"):
            todo = "leave ControlPath out of the ssh configuration"
            raise ClusterError(Problem(self.name, _NO_FORWARD, "its commands share no connection", todo))
        forward = ("-S", path.replace("%", "%%"), "-R", f"127.0.0.1:0:127.0.0.1:{port}", "--", self._login.address)

        def control(verb: str) -> subprocess.CompletedProcess[bytes] | None:
            return self.short(["ssh", "-F", "none", "-O", verb, *forward], _SHORT_S)

        done = control("forward")
        if done is not None and b"ontrol socket" in done.stderr:  # nobody is logged in
            self.run(Command.of("true")).checked(self.name)
            done = control("forward")
        if done is None or not done.stdout.strip().isdigit():
            text = "" if done is None else done.stderr.decode(errors="replace").strip()
            got = text.replace("\r", "").split("\n")[0].rpartition("failed: ")[2] or f"no answer within {_SHORT_S:g} s"
            raise ClusterError(Problem(self.name, _NO_FORWARD, got, "allow it in its sshd_config (AllowTcpForwarding)"))
        try:
            yield int(done.stdout)
        finally:
            control("cancel")

    def forget(self) -> None:
        """Has the next command log in anew, where the shared connection no longer answers."""
        self._connected = False
        self._forgotten += 1
        argv = self._login.argv("BatchMode=yes")
        self.short([argv[0], "-O", "stop", *argv[1:]], _SHORT_S)

    def ssh(self, line: str, *options: str) -> list[str]:
        """Returns the local argv that runs a shell line on the host."""
        return [*self._login.argv("BatchMode=yes", *options), line]


class _SshProcess(Process):
    """The ssh client of one command. Its output begins after a mark, and its exit code comes with another."""

    def __init__(self, host: SshHost, command: Command, line: str, marks: Marks, *, has_input: bool) -> None:
        self._host, self._command, self._marks = host, command, marks
        try:
            # No questions: neither at the terminal, whose session this is not, nor in a window.
            super().__init__(host.ssh(line), marks, env={"SSH_ASKPASS_REQUIRE": "never"}, cwd="/", has_input=has_input)
        except FileNotFoundError:
            todo = "install OpenSSH's client (openssh-client)"
            raise ClusterError(Problem("this machine", "has no ssh", "no ssh on PATH", todo)) from None

    @property
    def text(self) -> str:
        """What ssh, and the login shell, have said instead of the mark."""
        return self._marks.before(super().stderr).decode(errors="replace").replace("\r", "")

    @property
    def noise(self) -> str:
        """What came on stdout instead of the mark."""
        return self._marks.noise.decode(errors="replace")

    @property
    def stderr(self) -> bytes:
        return self._marks.errors(super().stderr)

    def begins(self, seconds: float) -> bool:
        """Waits until the command has begun; returns False if ssh ends before, or has not begun it within the time."""
        deadline = clock.now() + seconds
        while not self._marks.begun.wait(0 if self.has_ended() else 0.02):
            if self.has_ended():
                with suppress(OverdueError):
                    super().wait(clock.now() + _SHORT_S)
                return self._marks.begun.is_set()
            if clock.now() > deadline:
                return False
        return True

    def wait(self, deadline: float | None = None) -> int:
        super().wait(deadline)
        if (code := self._marks.exit_code(super().stderr)) is not None:
            return code
        if not self._is_ended:  # else the connection is whole
            self._host.forget()
        text = self._marks.errors(super().stderr).decode(errors="replace").strip().splitlines()
        what, todo = f"the connection was lost while `{shortened(self._command)}` ran", "check whether the host is up"
        got = text[-1] if text else "it was closed by the other side"
        raise ClusterError(Problem(self._host.name, what, got, f"{todo}, then try again"))

    def abort(self) -> None:
        """Ends the command on the host before its input closes: ssh passes no signal on."""
        line = script_line(self._marks.kill_script())
        self._host.short(self._host.ssh(line), _SHORT_S)
        super().abort()


def start_up_problem(name: str, target: Target, process: _SshProcess) -> Problem:
    """Returns the problem of a login whose shell does not run a command: a start-up file has another idea."""
    said = [line for line in (process.noise + process.text).splitlines() if line.strip()]
    what = "its login shell ends or waits before it runs a command"
    todo = f"look at what {_START_UP} does without a terminal: `{target.by_hand} true` must end at once"
    return Problem(name, what, said[-1].strip() if said else "no output", todo)


def control_folder() -> Path:
    """Returns the folder of ssh's control sockets, which only this user may enter. Its path is short, as theirs are."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime, "tridock") if runtime and os.access(runtime, os.W_OK) else None
    # A socket's path has at most 107 bytes, of which ssh needs 67; TMPDIR may be a long one.
    folder = folder or Path("/tmp", f"tridock-{os.getuid()}")  # noqa: S108 - it is checked below
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        what, got = "belongs to others, or lets them in", f"mode {stat.filemode(found.st_mode)}, uid {found.st_uid}"
        raise RequestError(Problem(str(folder), what, got, f"remove it: rm -rf {shlex.quote(str(folder))}"))
    return folder


def _has_terminal() -> bool:
    """Whether this process can be asked something: it is in the foreground of a terminal."""
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _existing(path: str, field: str) -> str:
    full = Path(path).expanduser()
    if not full.is_file():
        raise RequestError(Problem(field, "names a file that does not exist", str(full), "correct the path"))
    return str(full)
