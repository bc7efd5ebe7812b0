"""Files of ranks that only tiles.json describes."""
