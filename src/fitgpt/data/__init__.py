"""Text to shards to training batches. numpy, no torch; shard_header, manifest and nanogpt_meta need no numpy either."""
