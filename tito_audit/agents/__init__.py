"""An agent and an environment, run to a training sample that the audit has checked."""
