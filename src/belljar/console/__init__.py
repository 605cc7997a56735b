"""The web console: pages that show sessions as they run, over the same `Engine` as the HTTP API.

`app.py` has the routes, `middleware.py` stands before all of them, `pages.py` makes what a template gets, `cells.py`
turns output into blocks, `stream.py` sends changes of a page, `frames.py` serves what cells displayed. Templates and
scripts are ours; nothing is fetched from elsewhere.
"""
