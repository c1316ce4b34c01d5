"""Gates in trainers: batches audited inside training, failing rows taken out of the loss, training stopped.

`BatchGate` does it in any loop. One module each fits it into a trainer, and refuses versions that it does not fit:
`trl`, `verl`, `slime` (also for miles), `nemo_rl` and `prime_rl`.
"""

from __future__ import annotations

from tito_audit.errors import GateError
from tito_audit.integrations.batch_gate import FITS, BatchGate, GatedBatch

__all__ = ["FITS", "BatchGate", "GateError", "GatedBatch"]
