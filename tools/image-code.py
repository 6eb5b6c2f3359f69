"""image-code.py SOURCE TARGET: gives TARGET the files of SOURCE and compiles them; leaves those alone that are equal.

So a layer of the image holds only what differs from the layers below it.
"""

import compileall
import filecmp
import shutil
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])


def remove_compiled(path: Path) -> None:
    """Removes what was compiled from a file: compileall looks at the time of an edit only, in seconds."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


for path in sorted(target.rglob("*"), reverse=True):
    if "__pycache__" in path.parts:
        continue
    if path.is_dir() and not (source / path.relative_to(target)).is_dir():
        shutil.rmtree(path)
    elif path.is_file() and not (source / path.relative_to(target)).is_file():
        path.unlink()
        remove_compiled(path)
target.mkdir(exist_ok=True)
for path in sorted(source.rglob("*")):
    there = target / path.relative_to(source)
    if path.is_dir():
        there.mkdir(exist_ok=True)
    elif not there.exists() or there.stat().st_mode != path.stat().st_mode or not filecmp.cmp(path, there, False):
        shutil.copy2(path, there)
        remove_compiled(there)
if not compileall.compile_dir(target, quiet=1):
    sys.exit(1)
