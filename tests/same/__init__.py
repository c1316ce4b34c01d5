"""Two checkouts, held against each other byte for byte: does a rebuilt tito-audit do what it did before?

Knows the audit by its command line alone, so that every module of it may be renamed.

inputs    the logs that both read: fixtures, real data where it is there, and logs full of faults
mutate    rows with faults put into them
cases     the command lines
driver    many command lines in one process, run inside a checkout
side      one checkout at work
compare   what two runs gave, and where they differ
allow     differences that are wanted
runner    all cases on both sides
lines     the figures of a checkout's structure
"""
