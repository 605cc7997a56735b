"""What one can see of sessions and do with them: one contract for every way in that people and programs have.

`contract.py` says what there is and who asks, `models.py` what is returned. `local.py` serves sessions of this process,
`remote.py` those of all servers of a data directory. The console, the API and commands authenticate and translate.
"""
