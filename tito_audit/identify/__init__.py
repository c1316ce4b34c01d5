"""What explains the recorded ids of a log: tokenizer, chat template, arguments, date."""
