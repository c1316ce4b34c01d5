"""Keys common to many formats and what their values mean, to find the unread parts of a row."""

from __future__ import annotations

ID_LISTS = {
    "completion_ids",
    "completion_token_ids",
    "completion_tokens",
    "generated_ids",
    "generation_token_ids",
    "input_ids",
    "input_tokens",
    "output_ids",
    "output_token_ids",
    "output_tokens",
    "prompt_ids",
    "prompt_token_ids",
    "prompt_tokens",
    "prompts",
    "response_ids",
    "response_token_ids",
    "response_tokens",
    "responses",
    "token_ids",
    "tokens",
}
KINDS = {
    **dict.fromkeys(
        (
            *("content", "text", "message", "output", "input", "summary", "reasoning", "reasoning_content"),
            *("thinking", "instructions", "output_text"),
        ),
        "text",
    ),
    **dict.fromkeys(("id", "call_id", "tool_call_id", "source_call_id"), "call"),
    **dict.fromkeys(("name", "function_name", "tool_name"), "name"),
    **dict.fromkeys(("finish_reason", "stop_reason"), "finish"),
    **dict.fromkeys(("weight_version", "weight_versions", "model_version", "weight_step"), "weights"),
}
"""Keys that mean the same in different formats."""
LONGEST_KEY = 40
SHAPE = {"type", "object"}
"""Keys whose values are the format's keywords."""
BOUNDS = {"cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k"}
"""Keys of token counts up to the end of each sample."""
COUNTS = {
    "completion_length",
    "completion_tokens",
    "cum_len",
    "doc_lengths",
    "doc_lens",
    "document_lengths",
    "input_length",
    "input_lengths",
    "input_tokens",
    "length",
    "n_input_tokens",
    "n_output_tokens",
    "num_calls",
    "num_input_tokens",
    "num_output_tokens",
    "num_tokens",
    "num_total_tokens",
    "num_turns",
    "output_tokens",
    "packed_lengths",
    "prompt_len",
    "prompt_length",
    "prompt_tokens",
    "response_length",
    "sample_lengths",
    "sample_lens",
    "seq_lengths",
    "seq_lens",
    "seqlens",
    "sequence_lengths",
    "sequence_lens",
    "total_length",
    "total_tokens",
}
"""Keys of counts that follow from the tokens and calls themselves."""
SCORES = {"logprob", "token_id"}
TEXTS_OF_CALLS = ("completion_text", "text", "response_text", "output_text", "prompt_text")
