"""The forms that a log can be converted to."""

from tito_audit.convert.makers.generic import CALLS, ROWS
from tito_audit.convert.makers.nemo import MESSAGE_LOG, NEMO_GYM, NEMO_RL
from tito_audit.convert.makers.samples import ATROPOS_GROUP, SLIME, TITO_SAMPLE

__all__ = ["MAKERS"]

MAKERS = (CALLS, ROWS, TITO_SAMPLE, SLIME, ATROPOS_GROUP, NEMO_RL, MESSAGE_LOG, NEMO_GYM)
