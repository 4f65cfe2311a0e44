"""Conversations: rows become messages, a template makes tokens of them, and whole conversations fill sequences.

A conversation is an array of codes: a token's id times 2, plus 1 if it is learned. So its labels are stored, cached,
hashed and compared with its tokens.
"""
