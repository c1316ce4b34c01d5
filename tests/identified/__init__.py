"""Logs whose tokenizer, template and arguments are known, written without any code of tito-audit."""
