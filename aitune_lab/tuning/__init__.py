"""How a target is tuned: plan, candidates, strategies, the run and its events."""
