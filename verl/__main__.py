"""`python -m verl` is `verl`."""

from verl.cli.main import main

raise SystemExit(main())
