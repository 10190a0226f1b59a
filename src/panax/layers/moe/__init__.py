"""Mixture-of-experts layers: routing, experts and their load."""
