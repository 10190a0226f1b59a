"""How the suite is run: tiers, durations, budgets, the rotating share of slow tests, and what a change affects."""
