"""First file of every Python process that verl starts: `python child_main.py MODULE ARGUMENTS...`.

It runs MODULE as `python -m` does, but the current folder is not on sys.path: a `json.py` there is not imported. `python -P`
does the same from Python 3.11 on. The package verl is the one of the parent, from whichever folder that has it.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _HERE:  # Python adds the folder of its first file
    del sys.path[0]


def main() -> None:
    """See above."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from runpy import run_module

    root = os.path.dirname(os.path.dirname(_HERE))
    if root not in sys.path:
        sys.path.append(root)  # last, since a checkout has other folders too
    spec = PathFinder.find_spec("verl", [root])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["verl"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["verl"])
    run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
