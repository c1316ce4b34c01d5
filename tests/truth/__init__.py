"""Training rows whose every token is known, and what a scan and a repair have to make of them.

Shares no code with the audit and runs it through the command line only.

source      conversations that real models sampled: ids, and the logprob of each token that was sampled
conventions how right writers write a row: its loss mask and logprobs
observed    what a row shows once a fault is in it
decide      whether a row may be right, and which slides explain it, by brute force
expect      what is right to say of a row, and what is not
plan        which rows a run has, and in which files they stand
forms       how rows are written, and read back from what a repair wrote
tool        the command line
judge       what was said and written, held against the truth
beside      what stands beside tokens, as each framework writes it: experts, kept sets, credit, weight versions
odd         logs with an odd row and without: what is said of the others, and made of them
table       the counts
tokenizers  logs of each tokenizer, read with each other
"""
