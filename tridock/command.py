"""A command as data. It is composed here and executed elsewhere.

``Command`` holds an argv, its environment, working folder and standard input. ``render()`` returns a shell line that
runs exactly that argv; ``str()`` returns the same line with secrets masked, for logs and dry runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

MASK = "*****"


@dataclass(frozen=True, slots=True)
class Command:
    """An argv with its environment, working folder and standard input.

    ``str()`` masks every value in ``secrets``, also within an argument. Secret bytes go to standard input, which is
    never rendered.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    secrets: tuple[str, ...] = ()
    stdin: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("a command needs at least a program name")

    @classmethod
    def of(cls, *argv: str, env: Mapping[str, str] | None = None, stdin: bytes | None = None) -> Command:
        """Builds a command from separate arguments: ``Command.of("docker", "ps")``."""
        return cls(tuple(argv), env=dict(env or {}), stdin=stdin)

    def extended(self, arguments: Iterable[str]) -> Command:
        """Returns the command with ``arguments`` appended."""
        return replace(self, argv=(*self.argv, *arguments))

    def inside(self, prefix: Command) -> Command:
        """Returns ``prefix`` with this argv appended, as in ``docker exec NODE`` + this argv.

        ``env`` in front of the argv sets the environment and the working folder.
        """
        env: list[str] = []
        if self.env or self.cwd is not None:
            env.append("env")
            if self.cwd is not None:
                env += ["-C", self.cwd]
            env += [f"{name}={value}" for name, value in self.env.items()]
        return replace(
            prefix,
            argv=(*prefix.argv, *env, *self.argv),
            secrets=(*prefix.secrets, *self.secrets),
            stdin=self.stdin if self.stdin is not None else prefix.stdin,
        )

    def render(self) -> str:
        """Returns one shell line that runs exactly this command (POSIX quoting)."""
        quoted = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        quoted += [shlex.quote(argument) for argument in self.argv]
        line = " ".join(quoted)
        return f"cd {shlex.quote(self.cwd)} && {line}" if self.cwd is not None else line

    def __str__(self) -> str:
        if not self.secrets:
            return self.render()

        # Secrets are masked before quoting, because quoting can change their text.
        def masked(text: str) -> str:
            for secret in sorted(self.secrets, key=len, reverse=True):
                text = text.replace(secret, MASK) if secret else text
            return text

        visible = replace(
            self,
            argv=tuple(masked(argument) for argument in self.argv),
            env={name: masked(value) for name, value in self.env.items()},
            cwd=masked(self.cwd) if self.cwd is not None else None,
            secrets=(),
        )
        return visible.render()
