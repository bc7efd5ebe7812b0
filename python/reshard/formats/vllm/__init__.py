"""Folders that vLLM saves for its loader `sharded_state`: the state of each tensor-parallel rank."""
