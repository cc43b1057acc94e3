"""The engine core: requests, page ledger, step planning, hook contract. Standard library, numpy and
pluggy only."""
