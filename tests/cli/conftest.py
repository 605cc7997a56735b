from ran_commands import belljar, place

__all__ = ["belljar", "place"]
