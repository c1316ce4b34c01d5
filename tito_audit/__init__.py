"""Audits rollout logs for token-in-token-out: which rows break it, where, why and how badly.

The names below are the whole public API. Each is imported on first use, so `import tito_audit` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tito_audit.version import VERSION

if TYPE_CHECKING:
    from tito_audit.agents.rollout import rollout as rollout
    from tito_audit.agents.rollout import rollout_client as rollout_client
    from tito_audit.align.mask_drift import mask_drift as mask_drift
    from tito_audit.chains.fork import ForkedRow as ForkedRow
    from tito_audit.chains.fork import fork_cost as fork_cost
    from tito_audit.chains.fork import fork_rows as fork_rows
    from tito_audit.chains.splice import splice_prefix as splice_prefix
    from tito_audit.convert.run import Conversion as Conversion
    from tito_audit.convert.run import convert_rollouts as convert_rollouts
    from tito_audit.errors import ChoiceError as ChoiceError
    from tito_audit.errors import EncodeError as EncodeError
    from tito_audit.errors import ProviderError as ProviderError
    from tito_audit.errors import RecordError as RecordError
    from tito_audit.errors import RenderError as RenderError
    from tito_audit.errors import SetupError as SetupError
    from tito_audit.errors import SpliceError as SpliceError
    from tito_audit.errors import StorageError as StorageError
    from tito_audit.errors import TitoAuditError as TitoAuditError
    from tito_audit.errors import TokenizerError as TokenizerError
    from tito_audit.gate import GatedScan as GatedScan
    from tito_audit.gate import gate_rollouts as gate_rollouts
    from tito_audit.inspect.page import InspectedLog as InspectedLog
    from tito_audit.inspect.page import inspect_rollouts as inspect_rollouts
    from tito_audit.levels.facts import RecordLevel as RecordLevel
    from tito_audit.levels.tally import LogRecord as LogRecord
    from tito_audit.provider import GenerationChunk as GenerationChunk
    from tito_audit.provider import GenerationResult as GenerationResult
    from tito_audit.provider import ProviderOptions as ProviderOptions
    from tito_audit.provider import SamplingParams as SamplingParams
    from tito_audit.provider import ScoredTokens as ScoredTokens
    from tito_audit.provider import TokenProvider as TokenProvider
    from tito_audit.providers import open_provider as open_provider
    from tito_audit.providers.hf import HuggingFaceProvider as HuggingFaceProvider
    from tito_audit.providers.sglang import SGLangProvider as SGLangProvider
    from tito_audit.providers.trl import TRLProvider as TRLProvider
    from tito_audit.providers.vllm import VLLMProvider as VLLMProvider
    from tito_audit.record.finding import Finding as Finding
    from tito_audit.record.finding import Hit as Hit
    from tito_audit.record.finding import Result as Result
    from tito_audit.record.finding import Severity as Severity
    from tito_audit.record.finding import Side as Side
    from tito_audit.record.finding import Skip as Skip
    from tito_audit.record.finding import Where as Where
    from tito_audit.record.message import Message as Message
    from tito_audit.record.message import ToolCall as ToolCall
    from tito_audit.record.outcome import Outcome as Outcome
    from tito_audit.record.rollout import Place as Place
    from tito_audit.record.rollout import Rollout as Rollout
    from tito_audit.record.rollout import TrainingRow as TrainingRow
    from tito_audit.record.rollout import Turn as Turn
    from tito_audit.rescore.close import FirstDifference as FirstDifference
    from tito_audit.rescore.close import LogprobComparison as LogprobComparison
    from tito_audit.rescore.close import TokenGap as TokenGap
    from tito_audit.rescore.close import check_logprobs_close as check_logprobs_close
    from tito_audit.rows import CallRecord as CallRecord
    from tito_audit.rows import CallRow as CallRow
    from tito_audit.rows import RolloutRecord as RolloutRecord
    from tito_audit.rows import RolloutRow as RolloutRow
    from tito_audit.rows import record_digest as record_digest
    from tito_audit.run.auditor import load_renderer as load_renderer
    from tito_audit.run.batch import BatchAudit as BatchAudit
    from tito_audit.run.batch import BatchAuditor as BatchAuditor
    from tito_audit.run.batch import audit_batch as audit_batch
    from tito_audit.run.repair import Repairs as Repairs
    from tito_audit.run.repair import repair_rollouts as repair_rollouts
    from tito_audit.run.scan import Scan as Scan
    from tito_audit.run.scan import read_rollouts as read_rollouts
    from tito_audit.run.scan import scan_rollouts as scan_rollouts
    from tito_audit.run.validate import Validated as Validated
    from tito_audit.run.validate import validate_rollouts as validate_rollouts
    from tito_audit.run.write import write_rollouts as write_rollouts
    from tito_audit.sessions.delimiters import Delimiter as Delimiter
    from tito_audit.sessions.delimiters import Delimiters as Delimiters
    from tito_audit.sessions.delimiters import StoredTurn as StoredTurn
    from tito_audit.sessions.delimiters import build_multi_turn_ids as build_multi_turn_ids
    from tito_audit.sessions.delimiters import delimiters as delimiters
    from tito_audit.sessions.managed import ManagedServer as ManagedServer
    from tito_audit.sessions.managed import SequenceNode as SequenceNode
    from tito_audit.sessions.managed import as_group as as_group
    from tito_audit.sessions.managed import managed_server as managed_server
    from tito_audit.sessions.marin import MarinRollout as MarinRollout
    from tito_audit.sessions.marin import (
        extract_tokens_and_logprobs_from_choice as extract_tokens_and_logprobs_from_choice,
    )
    from tito_audit.sessions.marin import rollout_from_choice as rollout_from_choice
    from tito_audit.sessions.marin import tokenize_prompt_with_chat_template as tokenize_prompt_with_chat_template
    from tito_audit.sessions.sample import Sample as Sample
    from tito_audit.sessions.sample import SampledTurn as SampledTurn
    from tito_audit.sessions.sample import SampleStatus as SampleStatus
    from tito_audit.settings.model import GateSettings as GateSettings
    from tito_audit.settings.model import MaxRate as MaxRate
    from tito_audit.settings.model import Override as Override
    from tito_audit.settings.model import RepairChoices as RepairChoices
    from tito_audit.settings.model import RepairSettings as RepairSettings
    from tito_audit.settings.model import Requirement as Requirement
    from tito_audit.settings.model import Settings as Settings
    from tito_audit.summary import CoverageCount as CoverageCount
    from tito_audit.summary import Fixed as Fixed
    from tito_audit.summary import Gate as Gate
    from tito_audit.summary import RateCount as RateCount
    from tito_audit.summary import Summary as Summary
    from tito_audit.tables.findings import findings_schema as findings_schema
    from tito_audit.tables.findings import findings_table as findings_table

__version__ = VERSION

_HOMES = {
    "settings.model": "GateSettings MaxRate Override RepairChoices RepairSettings Requirement Settings",
    "agents.rollout": "rollout rollout_client",
    "convert.run": "Conversion convert_rollouts",
    "errors": "ChoiceError EncodeError ProviderError RecordError RenderError SetupError SpliceError "
    "StorageError TitoAuditError TokenizerError",
    "gate": "GatedScan gate_rollouts",
    "inspect.page": "InspectedLog inspect_rollouts",
    "levels.facts": "RecordLevel",
    "levels.tally": "LogRecord",
    "align.mask_drift": "mask_drift",
    "chains.fork": "ForkedRow fork_cost fork_rows",
    "chains.splice": "splice_prefix",
    "provider": "GenerationChunk GenerationResult ProviderOptions SamplingParams ScoredTokens TokenProvider",
    "providers": "open_provider",
    "providers.hf": "HuggingFaceProvider",
    "providers.sglang": "SGLangProvider",
    "providers.trl": "TRLProvider",
    "providers.vllm": "VLLMProvider",
    "rescore.close": "FirstDifference LogprobComparison TokenGap check_logprobs_close",
    "run.auditor": "load_renderer",
    "run.batch": "BatchAudit BatchAuditor audit_batch",
    "run.scan": "Scan read_rollouts scan_rollouts",
    "record.finding": "Finding Hit Result Severity Side Skip Where",
    "record.message": "Message ToolCall",
    "record.outcome": "Outcome",
    "record.rollout": "Place Rollout TrainingRow Turn",
    "sessions.delimiters": "Delimiter Delimiters StoredTurn build_multi_turn_ids delimiters",
    "sessions.managed": "ManagedServer SequenceNode as_group managed_server",
    "sessions.marin": "MarinRollout extract_tokens_and_logprobs_from_choice rollout_from_choice "
    "tokenize_prompt_with_chat_template",
    "sessions.sample": "Sample SampleStatus SampledTurn",
    "rows": "CallRecord CallRow RolloutRecord RolloutRow record_digest",
    "run.repair": "Repairs repair_rollouts",
    "summary": "CoverageCount Fixed Gate RateCount Summary",
    "tables.findings": "findings_schema findings_table",
    "run.validate": "Validated validate_rollouts",
    "run.write": "write_rollouts",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
