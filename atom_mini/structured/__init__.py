"""Answers in a form: a grammar decides which tokens may come next (chapter 24)."""
