def is_transient(e): return False
