"""Mixture-of-experts layers: tokens grouped once, experts as grouped products."""
