-- name: find_project
select p.id from project p where p.name = $1 and p.deleted_at is null;

-- name: add_project
insert into project (name, weight, max_running, max_queued, retention, rules, model_limits)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (name) do nothing
returning name, weight, max_running, max_queued, retention, rules, model_limits, revision, created_at;

-- name: get_project
select p.name, p.weight, p.max_running, p.max_queued, p.retention, p.rules, p.model_limits, p.revision, p.created_at
from project p where p.name = $1 and p.deleted_at is null;

-- name: replace_project
update project p set
    weight = $2, max_running = $3, max_queued = $4, retention = $5, rules = $6, model_limits = $7,
    revision = p.revision + 1
where p.name = $1 and p.revision = $8 and p.deleted_at is null
returning p.name, p.weight, p.max_running, p.max_queued, p.retention, p.rules, p.model_limits, p.revision, p.created_at;

-- name: resume_agent
delete from lost_runner l
where l.agent = (
    select n.id from interned_name n join project p on p.id = n.project_id
    where p.name = $1 and n.kind = 2 and n.name = $2
)
returning l.paused_at is not null as was_paused;

-- name: list_projects
select p.name, p.weight, p.max_running, p.max_queued, p.retention, p.rules, p.model_limits, p.revision, p.created_at
from project p
where p.name > $1 and ($2::text is null or p.name = $2) and p.deleted_at is null
order by p.name
limit $3;
