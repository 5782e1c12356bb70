-- Deletion of projects, and removal of what belongs to deleted ones. Rows go in batches of $2, those that others refer to last.

-- name: hold_project
select
    p.id,
    case when p.deleted_at is null then (
        select i.id from item i where i.session is not null and i.project_id = p.id limit 1
    ) end as running
from project p where p.name = $1 for update;

-- name: mark_deleted
update project p set deleted_at = coalesce(p.deleted_at, now()) where p.name = $1;

-- name: revoke_project_tokens
update issued_token t set revoked_at = coalesce(t.revoked_at, now()) where t.project = $1;

-- name: deleted_projects
-- With whether every request that still knew the name has ended.
select p.id, p.name, p.deleted_at < now() - interval '1 minute' as is_settled
from project p where p.deleted_at is not null and p.emptied_at is null order by p.id;

-- name: has_rollouts
select
    exists (select 1 from item i where i.project_id = $1) or exists (select 1 from rollout r where r.project_id = $1) as has;

-- name: remove_groups_of_project
delete from rollout_group g
where g.ctid = any (array(select q.ctid from rollout_group q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_usage_of_attempts
delete from usage_attempt u
where u.ctid = any (array(select q.ctid from usage_attempt q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_usage_of_rollouts
delete from rollout_usage u
where u.ctid = any (array(select q.ctid from rollout_usage q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_usage_of_minutes
delete from usage_minute u
where u.ctid = any (array(select q.ctid from usage_minute q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_recorded_calls
delete from recorded_call c
where c.ctid = any (array(select q.ctid from recorded_call q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_conversations
delete from conversation c
where c.ctid = any (array(select q.ctid from conversation q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_resource_uses
delete from resource_use u
where u.ctid = any (array(
    select q.ctid from resource r join resource_use q on q.resource_id = r.id where r.project_id = $1 limit $2
)) returning 1;

-- name: remove_resource_aliases
delete from resource_alias a
where a.ctid = any (array(
    select q.ctid from resource r join resource_alias q on q.resource_id = r.id where r.project_id = $1 limit $2
)) returning 1;

-- name: remove_resource_dependencies
delete from resource_dependency d
where d.ctid = any (array(
    select q.ctid from resource r join resource_dependency q on q.resource_id = r.id where r.project_id = $1 limit $2
)) returning 1;

-- name: remove_resource_versions
delete from resource_version v
where v.ctid = any (array(
    select q.ctid from resource r join resource_version q on q.resource_id = r.id where r.project_id = $1 limit $2
)) returning 1;

-- name: remove_resources
delete from resource r
where r.ctid = any (array(select q.ctid from resource q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_secrets
delete from secret s where s.ctid = any (array(select q.ctid from secret q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_schedules
-- With their runs.
delete from schedule s
where s.ctid = any (array(select q.ctid from schedule q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_audit_entries
-- Those of the calls with its tokens; that it was deleted is an entry of all projects.
delete from audit_entry a
where a.ctid = any (array(
    select q.ctid from project p join audit_entry q on q.project = p.name where p.id = $1 limit $2
)) returning 1;

-- name: remove_request_log
delete from request_log l
where l.ctid = any (array(select q.ctid from request_log q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_durations
delete from task_duration d
where d.ctid = any (array(
    select q.ctid from interned_name n join task_duration q on q.task_type = n.id where n.project_id = $1 limit $2
)) returning 1;

-- name: remove_lost_runners
delete from lost_runner l
where l.ctid = any (array(select q.ctid from lost_runner q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_names_of_project
delete from interned_name n
where n.ctid = any (array(select q.ctid from interned_name q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_run_leases
delete from run_lease l
where l.ctid = any (array(select q.ctid from run_lease q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_training_runs
delete from training_run t
where t.ctid = any (array(select q.ctid from training_run q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_recorded_sizes
delete from recorded_size s
where s.ctid = any (array(select q.ctid from recorded_size q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_stored_responses
delete from stored_response r
where r.ctid = any (array(select q.ctid from stored_response q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_stored_response_sizes
delete from stored_response_size s
where s.ctid = any (array(select q.ctid from stored_response_size q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_counts
-- Their sums are zero by now.
delete from live_count c
where c.ctid = any (array(select q.ctid from live_count q where q.project_id = $1 limit $2)) returning 1;

-- name: remove_budget_spend
delete from budget_spend b
where b.ctid = any (array(select q.ctid from budget_spend q where q.project_id = $1 limit $2)) returning 1;

-- name: mark_emptied
update project p set emptied_at = now() where p.id = $1 and p.deleted_at is not null;
