module blobd/client

go 1.21
