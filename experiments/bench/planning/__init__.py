"""Predicts what an RL step costs on devices that are not there: see experiments/plan.py."""
