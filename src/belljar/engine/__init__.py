"""What one can see of sessions and do with them: one contract for every way in that people and programs have.

`contract.py` says what there is and who asks, `models.py` what is returned, `operations.py` how HTTP asks for it.
`local.py` serves the sessions of this process, `remote.py` those of another server, `many.py` those of several as one.
The console, the API and commands authenticate and translate.
"""
