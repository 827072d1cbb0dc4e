"""Why memory ran out, or where it went, in words: from a message, a reading, a plan or a run."""
