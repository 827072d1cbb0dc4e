"""Text to shards to training batches. numpy, no torch; shards needs no numpy either."""
