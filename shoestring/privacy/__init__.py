"""Differential privacy: accounting of epsilon, and the ledger of what was released."""
