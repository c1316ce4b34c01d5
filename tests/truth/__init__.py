"""Training rows whose every token is known, and what a scan and a repair have to make of them.

Shares no code with the audit and runs it through the command line only.

source      conversations that real models sampled: ids, and the logprob of each token that was sampled
observed    what a row shows of a conversation: its loss mask and logprobs, faults among it
decide      which slides explain what a row shows, by brute force
expect      what is right to say of a row, and what is not
plan        which rows a run has, and in which files they stand
forms       how rows are written, and read back from what a repair wrote
tool        the command line
judge       what was said and written, held against the truth
table       the counts
tokenizers  logs of each tokenizer, read with each other
"""
