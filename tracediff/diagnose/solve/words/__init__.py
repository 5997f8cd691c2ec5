"""Edits of loops in the reader's words.

The `speaker` puts an edit into words: it lays its loops beside the right ones (`syntax`), runs both to see which
`places`, keys (`masks`) and `counts` differ, and calls what they are of by its `names`, which `nouns` lists.
"""
