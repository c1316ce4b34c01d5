"""Gates in trainers: audit each batch, take failing rows out of the loss, and stop the training if too many fail.

`BatchGate` works in any loop. A module for each trainer fits it in, and refuses versions that it does not know:
`trl`, `verl`, `slime` (also for miles), `nemo_rl` and `prime_rl`.
"""

from __future__ import annotations

from tito_audit.errors import GateError
from tito_audit.integrations.batch_gate import FITS, BatchGate, GatedBatch

__all__ = ["FITS", "BatchGate", "GateError", "GatedBatch"]
