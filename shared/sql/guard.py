"""What SQL may do in a worker: reads, listed functions, listed introspection PRAGMAs; the rest is refused.

Enforcement is SQLite's authorizer, asked while a statement is compiled (and again for statements that
SQLite compiles for itself while it runs, as for `pragma_table_info(...)` and full-text tables). It is
an allow-list: an action this page does not name is refused, new ones of later SQLite versions included.
"""

import sqlite3


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Introspection only. `database_list` is left out because it shows the path of the file.
PRAGMAS_WITH_ARGUMENT = _words(
    "table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list foreign_key_check"
)
# Read only without an argument (with one they would set something). Full-text tables ask for data_version themselves.
PRAGMAS_BARE = _words(
    "table_list foreign_key_check collation_list function_list module_list pragma_list compile_options encoding "
    "user_version application_id schema_version data_version page_count page_size freelist_count"
)

# Every function that only computes. Missing on purpose: load_extension, fts3_tokenizer (takes pointers), fts5 and
# rtreecheck internals, sqlite_log, edit/readfile/writefile (shell).
FUNCTIONS = _words(
    # core scalar
    "abs changes char coalesce concat concat_ws format glob hex if ifnull iif instr last_insert_rowid length like "
    "likelihood likely lower ltrim max min nullif octet_length printf quote random randomblob replace round rtrim sign "
    "soundex sqlite_compileoption_get sqlite_compileoption_used sqlite_source_id sqlite_version substr substring "
    "total_changes trim typeof unhex unicode unistr unistr_quote unlikely upper zeroblob "
    # aggregate and window
    "avg count group_concat string_agg sum total median percentile percentile_cont percentile_disc row_number rank "
    "dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value "
    # date and time
    "date time datetime julianday unixepoch strftime timediff current_date current_time current_timestamp "
    # mathematics
    "acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power "
    "radians sin sinh sqrt tan tanh trunc "
    # JSON
    "json json_array json_array_length json_array_insert json_error_position json_extract json_group_array "
    "json_group_object json_insert json_object json_patch json_pretty json_quote json_remove json_replace json_set "
    "json_type json_valid jsonb jsonb_array jsonb_array_insert jsonb_each jsonb_extract jsonb_group_array "
    "jsonb_group_object jsonb_insert jsonb_object jsonb_patch jsonb_remove jsonb_replace jsonb_set jsonb_tree -> ->> "
    # full-text search, reading side
    "match regexp snippet offsets matchinfo bm25 highlight fts5_source_id"
)

_READS = frozenset({sqlite3.SQLITE_READ, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE})
_ACTIONS = {
    getattr(sqlite3, f"SQLITE_{name}"): text
    for name, text in {
        "ATTACH": "ATTACH",
        "DETACH": "DETACH",
        "ALTER_TABLE": "ALTER TABLE",
        "ANALYZE": "ANALYZE",
        "REINDEX": "REINDEX",
        "SAVEPOINT": "SAVEPOINT",
        "TRANSACTION": "a transaction statement",
        "CREATE_VTABLE": "CREATE VIRTUAL TABLE",
        "DROP_VTABLE": "DROP TABLE",
        "INSERT": "a statement that writes",
        "UPDATE": "a statement that writes",
        "DELETE": "a statement that writes",
        "CREATE_INDEX": "CREATE INDEX",
        "CREATE_TABLE": "CREATE TABLE",
        "CREATE_TRIGGER": "CREATE TRIGGER",
        "CREATE_VIEW": "CREATE VIEW",
        "CREATE_TEMP_INDEX": "CREATE TEMP INDEX",
        "CREATE_TEMP_TABLE": "CREATE TEMP TABLE",
        "CREATE_TEMP_TRIGGER": "CREATE TEMP TRIGGER",
        "CREATE_TEMP_VIEW": "CREATE TEMP VIEW",
        "DROP_INDEX": "DROP INDEX",
        "DROP_TABLE": "DROP TABLE",
        "DROP_TRIGGER": "DROP TRIGGER",
        "DROP_VIEW": "DROP VIEW",
    }.items()
}
READ_ONLY = "the database is read-only, use SELECT, WITH, VALUES, EXPLAIN or an introspection PRAGMA"

# To connect a virtual table (full-text, json_each, pragma functions) SQLite compiles an UPDATE of sqlite_master that it
# never runs, so this can't be refused here. An UPDATE by the user fails all the same: sqlite_master may not be modified
# without writable_schema (a PRAGMA, refused), the connection is query_only and the file is opened read-only.
_MASTER_COLUMNS = _words("type name tbl_name rootpage sql")


class Guard:
    """The authorizer of one connection, and what it saw of the statement at hand.

    `denied` says what was refused first (None = nothing); `plain` is False as soon as the statement
    asked for anything beyond reading rows and calling functions.
    """

    def __init__(self) -> None:
        self.denied: str | None = None
        self.plain = True

    def reset(self) -> None:
        self.denied = None
        self.plain = True

    def authorize(self, action: int, first: str | None, second: str | None, _db: str | None, _by: str | None) -> int:
        """SQLite's callback: SQLITE_OK, or SQLITE_DENY, which makes the statement fail to compile."""
        if action in _READS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION:
            if second is not None and second.lower() in FUNCTIONS:
                return sqlite3.SQLITE_OK
            return self._deny(f"the function {second}() is not available here")
        if action == sqlite3.SQLITE_UPDATE and first == "sqlite_master" and second in _MASTER_COLUMNS:
            return sqlite3.SQLITE_OK
        self.plain = False
        if action == sqlite3.SQLITE_PRAGMA:
            name = (first or "").lower()
            if name in (PRAGMAS_BARE if second is None else PRAGMAS_WITH_ARGUMENT):
                return sqlite3.SQLITE_OK
            shown = f"PRAGMA {first}" if second is None else f"PRAGMA {first} with a value"
            return self._deny(f"{shown} is not allowed; allowed are {', '.join(sorted(PRAGMAS_WITH_ARGUMENT))}")
        return self._deny(f"{_ACTIONS.get(action, 'this statement')} is not allowed: {READ_ONLY}")

    def _deny(self, what: str) -> int:
        if self.denied is None:
            self.denied = what
        return sqlite3.SQLITE_DENY
