"""What a database's schema is, as a set of lines that do not depend on the order in which it was made."""

from __future__ import annotations

import asyncpg

__all__ = ["catalog"]

# Partitions of days come and go.
_OURS = "relnamespace = 'public'::regnamespace and relname !~ '_[0-9]{8}(_|$)'"
_PARTS = (
    f"select concat_ws(' ', 'relation', relname, relkind, relpersistence, reloptions) from pg_class where {_OURS}",
    f"""
    select concat_ws(' ', 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
        a.attidentity, a.attgenerated, a.attstorage, a.attcompression, pg_get_expr(d.adbin, d.adrelid))
    from pg_attribute a
    join (select oid, relname from pg_class where {_OURS}) c on c.oid = a.attrelid
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attnum > 0 and not a.attisdropped
    """,
    f"""
    select concat_ws(' ', 'constraint', c.relname, n.conname, n.convalidated, pg_get_constraintdef(n.oid))
    from pg_constraint n join (select oid, relname from pg_class where {_OURS}) c on c.oid = n.conrelid
    """,
    f"""
    select concat_ws(' ', 'index', pg_get_indexdef(i.indexrelid), i.indisvalid)
    from pg_index i join (select oid from pg_class where {_OURS}) c on c.oid = i.indexrelid
    """,
    f"""
    select concat_ws(' ', 'trigger', pg_get_triggerdef(t.oid), t.tgenabled)
    from pg_trigger t join (select oid from pg_class where {_OURS}) c on c.oid = t.tgrelid where not t.tgisinternal
    """,
    """
    select concat_ws(' ', 'function', pg_get_functiondef(p.oid)) from pg_proc p
    where p.pronamespace = 'public'::regnamespace
    """,
)


async def catalog(dsn: str) -> set[str]:
    """Returns everything that PostgreSQL's catalog knows of the schema: relations, columns, constraints, indexes,
    triggers and functions."""
    connection = await asyncpg.connect(dsn)
    try:
        return {row[0] for part in _PARTS for row in await connection.fetch(part)}
    finally:
        await connection.close()
