"""From text to shards to training windows. numpy, no torch; header, manifest and meta need not even numpy."""
