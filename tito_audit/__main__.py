"""`python -m tito_audit`, the same as `tito-audit`."""

from tito_audit.cli import main

main()
