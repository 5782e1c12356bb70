-- Sessions of the last release, which knew no projects: '' until a token of the same subject goes on with them, to which
-- they are bound from then on. Otherwise every attempt that runs during an upgrade would be lost. All sessions that are
-- there now are taken for such.
alter table runner_session alter column project set default '';
update runner_session set project = '' where ended_at is null;
