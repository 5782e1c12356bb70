-- Size of the stored request, by which leases of one answer are bounded before they are claimed. Of rows that have none, as
-- of those that an older store writes, the largest is assumed.
alter table item add column request_bytes int not null default 394240 check (request_bytes >= 0);
