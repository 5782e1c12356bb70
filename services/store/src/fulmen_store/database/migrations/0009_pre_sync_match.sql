-- The runner session that waited when the rollout was created: rollout and lease are one commit then. Null if none did.
alter table rollout add column matched uuid;
