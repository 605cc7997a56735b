"""The tables of the journal's file, and the migration of a file that an earlier belljar wrote."""

import sqlite3
from pathlib import Path

from belljar.errors import SettingsError

_FIRST = """
CREATE TABLE IF NOT EXISTS executions (
    id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    principal TEXT NOT NULL,
    code TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    result TEXT,
    undone_at REAL,
    key TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS executions_by_key ON executions (principal, key) WHERE key IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (
    execution_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (execution_id, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    principal TEXT NOT NULL,
    environment TEXT NOT NULL,
    reason TEXT NOT NULL,
    run TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at REAL NOT NULL,
    used_at REAL NOT NULL,
    executions INTEGER NOT NULL DEFAULT 0,
    variables TEXT NOT NULL DEFAULT '[]',
    unkept TEXT NOT NULL DEFAULT '[]',
    end TEXT NOT NULL DEFAULT ''
);
"""
# The columns that the limit on the journal's size needs. The index is by session only, because executions are ordered
# by their rowid, which a change of the clock does not affect.
_BOUNDED = """
ALTER TABLE executions ADD COLUMN started_at REAL;
ALTER TABLE executions ADD COLUMN output_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE executions ADD COLUMN display_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE executions ADD COLUMN dropped_at REAL;
UPDATE executions SET started_at = submitted_at;
UPDATE executions SET output_bytes =
    (SELECT coalesce(sum(length(text) + length(data)), 0) FROM events WHERE execution_id = executions.id);
DROP INDEX IF EXISTS executions_of_session;
CREATE INDEX executions_in_order ON executions (session_id);
CREATE INDEX executions_with_displays ON executions (display_bytes) WHERE display_bytes > 0;
CREATE INDEX executions_dropped ON executions (dropped_at) WHERE dropped_at IS NOT NULL;
"""
# Names that callers of the REST surface chose for sessions of theirs.
_IDENTIFIED = """
CREATE TABLE identifiers (
    principal TEXT NOT NULL,
    identifier TEXT NOT NULL,
    session_id TEXT NOT NULL,
    made_at REAL NOT NULL,
    PRIMARY KEY (principal, identifier)
) WITHOUT ROWID;
CREATE INDEX identifiers_of_session ON identifiers (session_id);
"""
# Runs of workflows and their steps. The server of a run is the one that drives it; empty while none does.
_RUNS = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    principal TEXT NOT NULL,
    name TEXT NOT NULL,
    text TEXT NOT NULL,
    texts TEXT NOT NULL,
    source TEXT NOT NULL,
    digest TEXT NOT NULL,
    variables TEXT NOT NULL,
    session_id TEXT NOT NULL DEFAULT '',
    server TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL,
    wanted TEXT NOT NULL DEFAULT '',
    started_at REAL NOT NULL,
    ended_at REAL,
    end TEXT NOT NULL DEFAULT '',
    value TEXT
);
CREATE INDEX runs_of_owner ON runs (principal, started_at);
CREATE INDEX runs_open ON runs (state) WHERE state IN ('running', 'waiting', 'interrupted');
CREATE TABLE steps (
    number INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    path TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    execution_id TEXT NOT NULL DEFAULT '',
    session_id TEXT NOT NULL DEFAULT '',
    value TEXT,
    error TEXT NOT NULL DEFAULT '',
    notes TEXT NOT NULL DEFAULT '',
    question TEXT,
    answer TEXT,
    expires_at REAL,
    began_at REAL NOT NULL,
    ended_at REAL
);
CREATE UNIQUE INDEX steps_of_run ON steps (run_id, path, attempt);
CREATE INDEX steps_waiting ON steps (state) WHERE state = 'waiting';
"""
# What a person who looks at sessions wants to know: where a session came from, who ran a cell and through which client,
# when it ended, and the tools that it called.
_OBSERVED = """
ALTER TABLE sessions ADD COLUMN origin TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN origin_execution TEXT NOT NULL DEFAULT '';
ALTER TABLE executions ADD COLUMN author TEXT NOT NULL DEFAULT '';
ALTER TABLE executions ADD COLUMN client TEXT NOT NULL DEFAULT '';
ALTER TABLE executions ADD COLUMN ended_at REAL;
CREATE INDEX sessions_of_origin ON sessions (origin) WHERE origin <> '';
CREATE TABLE calls (
    execution_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    server TEXT NOT NULL,
    tool TEXT NOT NULL,
    state TEXT NOT NULL,
    started_at REAL NOT NULL,
    duration_s REAL NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (execution_id, number)
) WITHOUT ROWID;
"""
# What people were asked, who answered and where. What they typed is not kept.
_QUESTIONS = """
CREATE TABLE questions (
    id TEXT PRIMARY KEY,
    execution_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    principal TEXT NOT NULL,
    message TEXT NOT NULL,
    schema TEXT NOT NULL,
    is_password INTEGER NOT NULL,
    in_console INTEGER NOT NULL,
    put_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    state TEXT NOT NULL,
    ended_at REAL,
    answered_by TEXT NOT NULL DEFAULT '',
    answered_in TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX questions_of_session ON questions (session_id);
CREATE INDEX questions_by_end ON questions (ended_at);
"""
# What a question is about: who asks, the call or the code, the rule.
_SUBJECTS = "ALTER TABLE questions ADD COLUMN subject TEXT NOT NULL DEFAULT '';"
# What callers had installed for a session, as a cell that does the same, and the last execution before it.
_INSTALLS = """
CREATE TABLE installs (
    session_id TEXT NOT NULL,
    after_execution TEXT NOT NULL,
    code TEXT NOT NULL
);
CREATE INDEX installs_of_session ON installs (session_id);
"""
# How many servers in a row took a run over and ended before they had looked after their runs again; and what is shown
# of a run of ten thousand steps without reading them all.
_LONG_RUNS = """
ALTER TABLE runs ADD COLUMN tries INTEGER NOT NULL DEFAULT 0;
CREATE INDEX steps_in_order ON steps (run_id);
CREATE INDEX steps_open ON steps (run_id) WHERE state IN ('running', 'waiting', 'answered');
"""
# Which bundle in the store (`sessions/session_objects.py`) a session's folder is or went on from, and which owner
# object here allows to go on from it; negative while the head of that bundle is being put.
_BUNDLES = """
ALTER TABLE sessions ADD COLUMN bundle INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN owned INTEGER NOT NULL DEFAULT 0;
"""
# What was chosen, what was allowed in place of what was asked about, and what the agent was told with it.
_ANSWERS = """
ALTER TABLE questions ADD COLUMN chosen TEXT NOT NULL DEFAULT '';
ALTER TABLE questions ADD COLUMN edited TEXT NOT NULL DEFAULT '';
ALTER TABLE questions ADD COLUMN said TEXT NOT NULL DEFAULT '';
"""
_STEPS = {
    1: _FIRST,
    2: _BOUNDED,
    3: _IDENTIFIED,
    4: _RUNS,
    5: _OBSERVED,
    6: _QUESTIONS,
    7: _SUBJECTS,
    8: _INSTALLS,
    9: _LONG_RUNS,
    10: _BUNDLES,
    11: _ANSWERS,
}
VERSION = max(_STEPS)


def migrate(path: Path, connection: sqlite3.Connection) -> None:
    """Create the tables, or migrate those of an earlier version; each step is one transaction."""
    found = version_of(connection)
    if found > VERSION:
        raise SettingsError(
            f"Journal {path} is of a later belljar (version {found}, this one knows {VERSION})",
            hint="Upgrade belljar, or choose another data_directory",
        )
    if found == 0:
        # Only for a file without tables: changed later, it would need the whole file to be rewritten.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    # After `auto_vacuum`, because this writes the first page to disk.
    connection.execute("PRAGMA journal_mode = WAL")
    for version, script in _STEPS.items():
        if version_of(connection) < version:
            _step(connection, version, script)


def _step(connection: sqlite3.Connection, version: int, script: str) -> None:
    try:
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {version};\nCOMMIT;")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.rollback()
        # Another server may have started at the same moment, and taken this step first.
        if version_of(connection) < version:
            raise


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of a file's tables; 0 when it has none."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
