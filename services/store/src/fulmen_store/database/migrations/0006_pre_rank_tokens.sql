-- Role 7: a machine that takes ranks of one training run.
alter table issued_token drop constraint issued_token_role_check;
alter table issued_token add constraint issued_token_role_check check (role between 1 and 7);
