"""One step: collect, check, vote, reduce, update."""
