"""Text → shards → training batches. numpy, no torch; shards needs no numpy either."""
