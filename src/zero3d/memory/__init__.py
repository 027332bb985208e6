"""Where bytes are held: every buffer of the engine, by category and place."""
