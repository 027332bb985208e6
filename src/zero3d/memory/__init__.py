"""Where bytes are held.

arena   allocates every buffer of the engine, by category and place, and reads every device value
scratch how much the cast of masters takes beside them, and the update of those in halves
"""
