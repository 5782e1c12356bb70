-- columns: shown
--   id uuid, rollout_id uuid, dimension text, author text, value float8, comment text, created_at timestamptz,
--   updated_at timestamptz

-- name: hold_annotated
-- Until the annotation is there: deletion of the rollout waits, and removes it afterwards; and so do other additions, so that the
-- rollout never has more than the maximum.
select r.id from rollout r where r.id = $1 and r.project_id = $2 for no key update;

-- name: add_annotation
insert into annotation (id, project_id, rollout_id, dimension, author, value, comment)
select $1, $2, $3, $4, $5, $6, $7
where (select count(*) from annotation q where q.rollout_id = $3) < $8::int
on conflict (rollout_id, dimension, author) do nothing
returning {shown};

-- name: annotation_of_author
select {a.shown} from annotation a where a.rollout_id = $1 and a.dimension = $2 and a.author = $3;

-- name: update_annotation
-- Of the author $3; null for an admin.
update annotation a set
    updated_at = case when (a.value, a.comment) is distinct from ($4, $5) then now() else a.updated_at end,
    value = $4, comment = $5
where a.id = $1 and a.project_id = $2 and ($3::text is null or a.author = $3)
returning {a.shown};

-- name: delete_annotation
delete from annotation a where a.id = $1 and a.project_id = $2 and ($3::text is null or a.author = $3)
returning a.id;

-- name: list_annotations
-- A standby may answer.
select {a.shown} from annotation a
where a.project_id = $1 and a.id < $2
    and ($3::uuid is null or a.rollout_id = $3)
    and ($4::text is null or a.author = $4)
    and ($5::text is null or a.dimension = $5)
order by a.id desc limit $6;

-- name: scores_of_dimension
-- A standby may answer.
select a.rollout_id, a.author, a.value from annotation a
where a.project_id = $1 and a.dimension = $2
order by a.id desc limit $3;
