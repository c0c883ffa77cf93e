"""Generate the Python code of ``protos/`` into the package ``kev.v1``, or check that what is committed is current.

Invariants and semantics: the compiler is the oldest grpcio-tools that Kev supports (pinned in ``constraints.txt``),
because generated code refuses to run on a runtime older than its compiler. Only files with a service get a
``_pb2_grpc`` module. Usage: ``python protos/generate.py [--check]``.

Not here: lint and compatibility of the protos (buf, see ``buf.yaml``).
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent
PACKAGE = Path("kev/v1")


def generate(out: Path) -> None:
    """Write the generated modules below ``out``.

    Raises:
        RuntimeError: the compiler refused the protos; it has printed why.
    """
    sources = sorted((PROTOS / PACKAGE).glob("*.proto"))
    services = [path for path in sources if path.stem.endswith("_service")]
    common = ["protoc", f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
    runs = (
        [f"--python_out={out}", f"--pyi_out={out}", *map(str, sources)],
        [f"--grpc_python_out={out}", *map(str, services)],
    )
    for arguments in runs:
        if protoc.main(common + arguments) != 0:
            raise RuntimeError("protoc failed")


def stale_files(fresh: Path, committed: Path) -> list[str]:
    """Names of generated files that are missing, changed or left over in ``committed``."""
    wanted = {path.name: path.read_bytes() for path in (fresh / PACKAGE).iterdir()}
    present = {path.name: path.read_bytes() for path in (committed / PACKAGE).glob("*_pb2*")}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def main(arguments: list[str]) -> int:
    """Generate, or with ``--check`` compare; 0 when all is well."""
    if arguments != ["--check"]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        stale = stale_files(Path(directory), ROOT)
    for name in stale:
        print(f"{PACKAGE / name} differs from protos/: run `make proto` and commit the result", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
