"""Answers in a form: a grammar decides which tokens may come next (chapters 24 and 26)."""
